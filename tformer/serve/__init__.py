"""HTTP services over runs and loaded models (optional packages starlette and uvicorn)."""
