"""What can be known before hours of training are spent: sizes, data, machine, one step."""
