"""headrace's decoder: layers, their weights and costs, prediction heads, parts of several ranks."""
