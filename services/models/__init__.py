"""Target models from other formats: what comes out is a plain safetensors folder that every role can load."""
