"""An ordinary training script for torch. It prints its losses; test_torch.py changes one import."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Crop:
    """Takes a part of an image; which, follows from the image."""

    def __init__(self, size):
        self.size = size

    def __call__(self, image):
        top, left = (int(n) % (image.shape[0] - self.size) for n in image[0, :2])
        return image[top : top + self.size, left : left + self.size]


class Normalize:
    def __call__(self, image):
        return torch.from_numpy(image.astype(np.float32)).div_(255).sub_(0.13).div_(0.31)[None]


class Digits(Dataset):
    """Like MNIST, but made up."""

    def __init__(self, count, transforms):
        rng = np.random.default_rng(0)
        self.images = rng.integers(0, 256, (count, 32, 32), dtype=np.uint8)
        self.labels = rng.integers(0, 10, count)
        self.transforms = transforms

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        for transform in self.transforms:
            image = transform(image)
        return image, int(self.labels[index])


torch.manual_seed(0)
torch.set_num_threads(1)
data = Digits(512, [Crop(28), Normalize()])
sampler = DistributedSampler(data, num_replicas=2, rank=0, shuffle=True)
loader = DataLoader(data, batch_size=32, sampler=sampler, num_workers=2, persistent_workers=True)
model = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item().hex())
