"""Importing this module is the switch: for verl's own hook, which imports modules by name in every process.

    export VERL_USE_EXTERNAL_MODULES=mcore_entropy.adapters.verl_external

`import verl` then ends with `switch_verl()`. A version of verl that is not known stops the import.
"""

from mcore_entropy.adapters.verl_switch import switch_verl

handle = switch_verl()
