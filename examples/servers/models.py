"""Three wrapped models, for the servers beside this file: a vision tower, a SentenceTransformer, and a whole Qwen3-VL.

Graphs are captured in the background, from the first second on. A call that has no graph yet runs eager.
"""

import io

import torch
from PIL import Image, UnidentifiedImageError

import varlen_graphs as vg
from examples.generate import END, IMAGE, START
from examples.servers.weights import DEVICE, processor, sentence_transformer, tower, vision_language_model

OPTIONS = {
    "budgets": vg.Ladder() if DEVICE == "cuda" else [64, 256, 1024],
    "backend": "cuda" if DEVICE == "cuda" else "tape",
    "capture": vg.options.Capture(lazy=True),
}


class Served:
    """A wrapped model. `read` returns what the body of a request holds, `answer` the answers to several of those."""

    def start(self, *encoders):
        self.captures = {encoder: encoder.capture_in_background() for encoder in encoders}

    def encoders(self, name):
        """Return the encoders by names for metrics."""
        return {name if at == 0 else f"{name} {at}": one for at, one in enumerate(self.captures)}

    def stop(self):
        """Free the graphs."""
        for encoder, capture in self.captures.items():
            capture.cancel()
            encoder.release()


class Images(Served):
    """A vector for each image, the mean of the features of a tower that is wrapped by hand."""

    def __init__(self):
        self.encoder, self.read = vg.recipes.qwen3_vl(tower(), **OPTIONS), Patches().read
        self.start(self.encoder)

    @torch.inference_mode()
    def answer(self, images):
        pixels, grid = (torch.cat([image[name] for image in images]) for name in ("pixel_values", "image_grid_thw"))
        features = self.encoder(pixels.to(DEVICE), grid_thw=grid).pooler_output
        return [part.mean(0).tolist() for part in features.split((grid.prod(1) // 4).tolist())]


class Sentences(Served):
    """A vector for each text, by a SentenceTransformer that is wrapped in one line."""

    def __init__(self):
        self.model = vg.wrap(sentence_transformer(), **OPTIONS)
        self.start(*vg.encoders(self.model).values())

    def read(self, body):
        return body.decode()

    def answer(self, texts):
        return self.model.encode(list(texts), show_progress_bar=False).tolist()


class Chat(Served):
    """The tokens that a whole model generates about an image, its tower wrapped in one line."""

    def __init__(self):
        self.model, self.read = vg.wrap(vision_language_model(), **OPTIONS), Patches().read
        self.start(*vg.encoders(self.model).values())

    def answer(self, images):
        return [self.generate(**image) for image in images]

    def generate(self, pixel_values, image_grid_thw):
        ids = torch.tensor([[1, START, *[IMAGE] * (int(image_grid_thw.prod()) // 4), END, 5]])
        prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == IMAGE).long()}
        prompt |= {"pixel_values": pixel_values, "image_grid_thw": image_grid_thw}
        prompt = {name: one.to(DEVICE) for name, one in prompt.items()}
        return self.model.generate(**prompt, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :].tolist()


class Patches:
    """Reads an image as the patches that a tower takes."""

    def __init__(self):
        self.process = processor()

    def read(self, body):
        try:
            image = Image.open(io.BytesIO(body)).convert("RGB")
        except (UnidentifiedImageError, OSError, Image.DecompressionBombError):
            raise ValueError("the body is no image that can be read: expected a PNG or JPEG file") from None
        return {**self.process(image, return_tensors="pt")}


MODELS = {"images": Images, "sentences": Sentences, "chat": Chat}
