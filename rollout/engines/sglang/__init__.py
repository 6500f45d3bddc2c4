"""Engines behind SGLang's HTTP API: real SGLang, and the embedded engine, which honours it."""
