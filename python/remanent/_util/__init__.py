"""Durable files, checksummed JSON, progress bars and threads."""
