"""The policy: Megatron's GPT, its layout, optimizer, passes and Hugging Face form."""
