"""The panels around the views: chat, conversations, models, settings, conversion.

This face stays empty: code imports from the files.
"""
