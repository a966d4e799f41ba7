"""LoRA: adapters beside the weights of a model, several in one batch. Hu et al., "LoRA" (2021)."""
