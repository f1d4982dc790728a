"""Models in and out: the published layout of mdlm and duo, Hugging Face folders, the hub."""
