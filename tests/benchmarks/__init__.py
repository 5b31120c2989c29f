"""Speed of tformer beside other libraries (README.md)."""
