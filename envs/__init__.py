"""Environments: tasks from real code, the harness, the sandbox for what a model wrote, rewards.

Records and tensors are not known here, nor a broker: `consumers` carries results to the log.
"""
