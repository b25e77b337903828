"""What scripts that tests start in other processes train."""

BLOCK = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.b(F.gelu(self.a(x)))
"""
"""To stand behind imports of ``nn`` and ``F``."""
