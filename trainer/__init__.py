"""Fetch, pack, logprobs, advantages, loss, optimizer, publish: the trainer, on megatron-core."""
