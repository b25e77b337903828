// Some files are compiled several times, each time for one variant: toolkit.py lists them. HOT_NAME
// is the variant's name (bf16), HOT_VARIANT(f) the function of it (f_bf16), HOT_ELEMENT its type.
#pragma once

#define HOT_JOINED(function, name) function##_##name
#define HOT_JOIN(function, name) HOT_JOINED(function, name)
#define HOT_VARIANT(function) HOT_JOIN(function, HOT_NAME)
