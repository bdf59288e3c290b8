# short run: --n_epochs 1
"""A GAN with two optimizers."""

import argparse

import torch
import torch.nn as nn

opt = argparse.ArgumentParser()
opt.add_argument("--n_epochs", type=int, default=200)
opt.add_argument("--latent_dim", type=int, default=16)
opt = opt.parse_args()
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(opt.latent_dim, 64), nn.LeakyReLU(0.2), nn.Linear(64, 49), nn.Tanh())

    def forward(self, z):
        return self.model(z).view(-1, 1, 7, 7)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(49, 64), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(64, 1))

    def forward(self, img):
        return self.model(img.flatten(1))


adversarial_loss = nn.BCEWithLogitsLoss()
generator, discriminator = Generator().to(device), Discriminator().to(device)
dataloader = torch.utils.data.DataLoader(torch.rand(64, 1, 7, 7) * 2 - 1, batch_size=16, shuffle=True)
optimizer_G = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))

for epoch in range(opt.n_epochs):
    for i, real_imgs in enumerate(dataloader):
        real_imgs = real_imgs.to(device)
        valid = torch.ones(real_imgs.size(0), 1, device=device)
        fake = torch.zeros(real_imgs.size(0), 1, device=device)

        optimizer_G.zero_grad()
        z = torch.randn(real_imgs.size(0), opt.latent_dim, device=device)
        gen_imgs = generator(z)
        g_loss = adversarial_loss(discriminator(gen_imgs), valid)
        g_loss.backward()
        optimizer_G.step()

        optimizer_D.zero_grad()
        real_loss = adversarial_loss(discriminator(real_imgs), valid)
        fake_loss = adversarial_loss(discriminator(gen_imgs.detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        d_loss.backward()
        optimizer_D.step()

        if i % 2 == 0:
            print(f"[{epoch}/{opt.n_epochs}] [{i}/{len(dataloader)}] D {d_loss.item():.3f} G {g_loss.item():.3f}")
