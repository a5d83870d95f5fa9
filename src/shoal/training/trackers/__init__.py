"""Trackers: metrics, settings, plan and result of a run for TensorBoard, MLflow, Weights & Biases and Trackio."""
