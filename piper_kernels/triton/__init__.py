"""Device code and its launchers; nothing else in the package imports the library ``triton``.

This folder has the library's name. So: absolute imports only, import functions rather than this
package (never ``from piper_kernels import triton``), and run things with ``-m``.
"""
