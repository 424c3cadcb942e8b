"""A look inside: live norms while generating, views on demand, what-if edits, saved traces.

Every view is a wrapper around the modules of the one model, which is never changed and is not written twice.
"""
