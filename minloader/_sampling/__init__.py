"""Samplers, which decide what a batch is, and collate functions, which make one."""
