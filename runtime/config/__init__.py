"""Environment variables, folders, files written whole, and values of documents with their errors.

Here and not in `app.config`, since every layer reads variables and folders. `app/config/` has the settings themselves.
"""
