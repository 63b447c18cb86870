"""What the optimizer process imports, which every run waits for."""

import subprocess
import sys


def test_the_optimizer_process_starts_without_transformers() -> None:
    """It is PyTorch that it needs: the rest took more than half of the time until it was up."""
    program = "import sys, fuyou.optimizer.process.main; print(*({'transformers', 'peft'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []
