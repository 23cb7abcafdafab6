"""Settings, presets and bounded reads of files that the user names."""
