#include "common/old_glibc.hpp"
