"""What architectures are made of: each layer a fast path per device beside its plain reference."""
