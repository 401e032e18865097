"""Workloads, load generation, metrics and reports. Every figure carries its recipe."""
