"""Hugging Face models as files: families, names of tensors, folders. Without torch.distributed and Megatron."""
