"""Iterates one loader in this process and in a forked one."""

import multiprocessing

from torch.utils.data import DataLoader

loader = DataLoader(range(8), batch_size=4, num_workers=2)


def show(who):
    print(who, [batch.tolist() for batch in loader], type(iter(loader)).__module__, flush=True)


if __name__ == "__main__":
    show("parent")
    child = multiprocessing.get_context("fork").Process(target=show, args=("child",))
    child.start()
    child.join()
    show(f"parent after {child.exitcode}")
