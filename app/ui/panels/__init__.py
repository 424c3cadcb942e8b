"""The panels around the views: chat, conversations, models, settings, conversion.

This face stays empty: what is needed is imported from its file.
"""
