"""The configuration of pre-training and fine-tuning, and how it is composed."""
