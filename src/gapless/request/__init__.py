"""What users say and get: parameters, requests, outputs, messages."""
