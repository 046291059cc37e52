"""Faults of what is made for others: wheels for older systems, and the kernels hub."""

from __future__ import annotations

from .fault import Fault

OLD = "packages/old_libraries.py"
HUB = "packages/hub.py"

FAULTS = [
    Fault(
        name="old-libraries-newest-version",
        path=OLD,
        old="        return self.rank[1] <= NEWEST[self.rank[0]]\n",
        new="        return True\n",
        why="names are bound to this machine's versions",
    ),
    Fault(
        name="old-libraries-oldest-version",
        path=OLD,
        old="if symbol.old and (name not in found or found[name].rank < symbol.rank):",
        new="if symbol.old and name not in found:",
        why="a name may be bound to an older version than it has to be, such as memcpy of glibc 2.2.5",
        survives="the oldest versions of what the program calls do the same",
    ),
    Fault(
        name="old-libraries-thread-local",
        path=OLD,
        old='"TLS": (".section .tbss", "tls_object"), ',
        new="",
        why="call_once's thread-local names are taken for functions",
    ),
    Fault(
        name="old-libraries-no-parts",
        path=OLD,
        old="    for part in PARTS:\n        stand_in(part, [])\n",
        new="    for part in PARTS:\n        stand_in(part.replace('lib', 'no'), [])\n",
        why="threads and dlsym are in libraries of their own in glibc 2.28, which nothing asks for",
    ),
    Fault(
        name="hub-fixed-namespace",
        path="csrc/torch/ops.cpp",
        old="OPS(FLASH_WMMA_NAMESPACE, m) {",
        new="OPS(flash_wmma, m) {",
        why="the hub's ops have the installed package's names",
    ),
    Fault(
        name="hub-absolute-import",
        path="flash_wmma/_native.py",
        old='importlib.import_module("._C", __package__)',
        new='importlib.import_module("flash_wmma._C")',
        why="the hub's copy takes the table of kernels of the installed package",
    ),
    Fault(
        name="hub-absolute-distributed",
        path="flash_wmma/__init__.py",
        old='_import_module(f".{name}", __name__)',
        new='_import_module(f"flash_wmma.{name}")',
        why="the hub's copy takes flash_wmma.distributed of the installed package",
    ),
    Fault(
        name="hub-autocast",
        path="flash_wmma/_autocast.py",
        old="Library(NAMESPACE, ",
        new='Library("flash_wmma", ',
        why="autocast's rules are registered for the installed package alone",
    ),
    Fault(
        name="hub-extension-module",
        path=HUB,
        old='        if not product.name.startswith("_C."):\n            shutil.copy2(product, variant)\n',
        new="        shutil.copy2(product, variant)\n",
        why="an extension module for one Python goes along",
    ),
    Fault(
        name="hub-device-in-the-name",
        path=HUB,
        old='    device = "cpu" if os.environ.get("FLASH_WMMA_CUDA") == "0" else "cuda"\n',
        new='    device = "cuda"\n',
        why="the variants for CPUs and for CUDA have one namespace",
    ),
]
