"""Tensors and arrays as pages: element types, memory layouts, overlaps, and copies from and to devices."""
