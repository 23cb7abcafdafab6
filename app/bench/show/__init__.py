"""Views of benchmark documents: tables, live progress, text formats, the HTML report."""
