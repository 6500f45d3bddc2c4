"""Megatron's options: read from the installed megatron-core's source, checked before any rank starts. No torch here."""
