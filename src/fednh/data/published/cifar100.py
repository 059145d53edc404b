"""CIFAR-100 (Krizhevsky 2009): photos, 32x32 colour."""

from __future__ import annotations

from fednh.data.published.base import Published
from fednh.data.published.cifar import places, remote

CLASSES = tuple(
    """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard
    lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
    pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark
    shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone
    television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
    """.split()  # noqa: SIM905 (a list literal would fill a hundred lines)
)

CIFAR100 = Published(
    name="cifar100",
    description="photos, 32x32 colour, 100 classes, 50,000 + 10,000 images",
    shape=(32, 32, 3),
    mean=(0.507, 0.487, 0.441),
    std=(0.267, 0.256, 0.276),
    classes=CLASSES,
    accepts="cifar100.npz, cifar-100-binary.tar.gz, cifar-100-python.tar.gz, cifar-100-binary/ or cifar-100-python/",
    places=places(100),
    files=remote("cifar-100-python.tar.gz", "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"),
    augment="crop_flip",
)
