"""Small operations of a decoder, as plain torch and as kernels."""
