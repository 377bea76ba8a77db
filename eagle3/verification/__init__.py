"""The checks behind :mod:`eagle3.verify`, one module a kind of directory."""
