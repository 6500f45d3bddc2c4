# Sourced by bin/install and bin/install-sglang: chooses torch's build for this machine and says what it costs before it is downloaded.
# `pip` is their install command, with a constraint on the version of torch.
cpu_index=https://download.pytorch.org/whl/cpu

has_gpu() { [ -e /proc/driver/nvidia/version ]; }

# What pip with these options more would install as torch, in JSON; empty when torch is there. Only the CUDA build requires NVIDIA's packages.
torch_plan() { "${pip[@]}" --dry-run --no-deps --report - "$@" torch; }

# choose_torch CPU CUDA: what the whole installation costs with each build. Without a GPU it is the CPU build, from where pip is set up to look
# or else PyTorch's index. Silent when torch is there already. Install torch with the options `torch_from` and --no-deps, and alone: with a second
# index for all packages, a package of that index could take the place of another of the same name.
choose_torch() {
  local name=${0##*/} plan from_index
  torch_from=()
  plan=$(torch_plan)
  if [[ $plan == *'"nvidia-'* ]] && ! has_gpu; then
    from_index=$(torch_plan --index-url "$cpu_index" --timeout 10 --retries 0 2>/dev/null) || from_index=$plan
    [[ $from_index == *'"nvidia-'* ]] || torch_from=(--index-url "$cpu_index")
    plan=$from_index
  fi
  if [[ $plan != *'"nvidia-'* ]]; then
    [[ $plan != *'"name": "torch"'* ]] || echo "$name: torch's CPU build: $1"
  elif has_gpu; then
    echo "$name: torch's CUDA build, as this machine has a GPU: $2"
  else
    echo "$name: torch's CUDA build, though this machine has no GPU: $2"
    echo "$name: pip finds no CPU build ($1), neither where it is set up to look nor at $cpu_index"
    echo "$name: to get one stop this (Ctrl-C) and start again with PIP_EXTRA_INDEX_URL=URL or PIP_FIND_LINKS=DIR naming an index or a folder that has one"
  fi
}
