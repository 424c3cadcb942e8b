"""What one open tab holds, and the one thread that runs MLX for all of them.

This face stays empty: what is needed is imported from its file.
"""
