"""The desktop UI: a page that Gradio serves on this machine only.

This face stays empty: what is needed is imported from its file.
"""
