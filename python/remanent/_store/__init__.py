"""Python parts of the native classes: asynchronous waits, logging, search, HTML tables and read-only copies."""
