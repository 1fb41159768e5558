"""A worker of vLLM's with its own model runner for CPUs, without the compiled extensions that its CPU worker needs."""

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.worker_base import WorkerBase


class Worker(WorkerBase):
    def init_device(self):
        self.model_runner = CPUModelRunner(self.vllm_config, torch.device("cpu"))

    def load_model(self, *, load_dummy_weights=False):
        self.model_runner.load_model(load_dummy_weights)

    def determine_available_memory(self):
        with torch.inference_mode():
            self.model_runner.profile_run()
        return 0
