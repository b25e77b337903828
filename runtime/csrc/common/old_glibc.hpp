// Older names for what glibc has renamed: included by one source of each library, and by no header.
//
// A library that is linked on a new system asks for the newest version of every symbol, and then
// does not load on an older one, though all that it needs is there. What torch's and the compiler's
// headers call is defined here once more, for this library alone (its symbols are hidden), by the
// versions that every x86-64 glibc has. `hot-compile wheel` reads off what is left.
#pragma once

#include <features.h>

#if defined(__GLIBC__) && defined(__x86_64__)

extern "C" {

// Since 2.32, read by shared_ptr's counters: false means that they always count atomically.
char __libc_single_threaded = 0;

// Since 2.34, when libdl and libpthread became part of libc; torch brings both in on older systems.
void* hot_old_dlsym(void*, const char*);
int hot_old_pthread_once(int*, void (*)());
__asm__(".symver hot_old_dlsym, dlsym@GLIBC_2.2.5");
__asm__(".symver hot_old_pthread_once, pthread_once@GLIBC_2.2.5");

void* dlsym(void* library, const char* name) { return hot_old_dlsym(library, name); }
int pthread_once(int* once, void (*routine)()) { return hot_old_pthread_once(once, routine); }

}  // extern "C"

#endif
