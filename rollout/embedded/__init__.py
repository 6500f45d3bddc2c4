"""A small continuous-batching server for Hugging Face causal models on CPU; it answers as SGLang's native HTTP API does.

Layout, in the order a request meets it:

    server       HTTP: one task per request, JSON in and out
    request      the body of /generate, checked and expanded to sequences
    core         one step: admit, prefill, decode, sample, finish; the thread that takes them, and its inbox
    scheduler    who waits, who runs, who is admitted
    kv_cache     keys and values of the running rows
    model        the forward pass
    sampling     logits to tokens and logprobs
    model_weights  safetensors on disk to tensors of the model
"""
