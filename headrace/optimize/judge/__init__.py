"""Decides about candidates: right or wrong, faster or not. Candidates are untrusted native code."""
