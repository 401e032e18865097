"""Ops with their reference in plain torch, and the table that chooses which implementation runs."""
