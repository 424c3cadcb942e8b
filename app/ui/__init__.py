"""The desktop UI: a page that Gradio serves to this machine only.

This face stays empty: code imports from the files.
"""
