# short run: --rounds 2
# A notebook turned into a script: everything at module level.
import sys

import numpy as np
import torch
from torch import nn, optim
from torch.nn import NLLLoss
from torch.utils.data import DataLoader, TensorDataset

NUM_EPOCHS = int(sys.argv[2]) if len(sys.argv) > 2 else 20
use_cuda = torch.cuda.is_available()

rng = np.random.default_rng(0)
features = torch.tensor(rng.normal(size=(200, 64)), dtype=torch.float32)
targets = torch.tensor(rng.integers(0, 10, size=200))
trainloader = DataLoader(TensorDataset(features[:160], targets[:160]), batch_size=20, shuffle=True)
testloader = DataLoader(TensorDataset(features[160:], targets[160:]), batch_size=20)

net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10), nn.LogSoftmax(dim=1))
if use_cuda:
    net = net.cuda()
criterion = NLLLoss()
opt = optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
sched = optim.lr_scheduler.StepLR(opt, step_size=5, gamma=0.5)

history = []
for epoch in range(NUM_EPOCHS):
    net.train()
    epoch_loss = 0
    for inputs, labels in trainloader:
        if use_cuda:
            inputs, labels = inputs.cuda(), labels.cuda()
        out = net(inputs)
        loss = criterion(out, labels)
        opt.zero_grad()
        loss.backward()
        opt.step()
        epoch_loss += loss.item()
    sched.step()

    net.eval()
    hits = 0
    with torch.no_grad():
        for inputs, labels in testloader:
            if use_cuda:
                inputs, labels = inputs.cuda(), labels.cuda()
            hits += (net(inputs).argmax(dim=1) == labels).sum().item()
    history.append((epoch_loss / len(trainloader), hits / len(testloader.dataset)))
    print("epoch", epoch, "loss %.3f accuracy %.3f" % history[-1])

torch.save(net.state_dict(), "digits.pth")
net.load_state_dict(torch.load("digits.pth", weights_only=True))
