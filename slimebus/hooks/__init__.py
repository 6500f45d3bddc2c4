"""Plug-ins by import path."""
