"""Versions of a store's state: listing, retention, removal and comparison."""
