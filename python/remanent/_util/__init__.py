"""Durable files, checksummed JSON and threads."""
