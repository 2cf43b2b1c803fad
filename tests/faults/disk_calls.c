/* Records the calls that change files, for power_cut.py. It is preloaded with DISK_ROOT, the folder whose files
 * count, and DISK_CALLS, the record. Each call is a line of six fields (call, file number, offset or size, bytes
 * written, path, second path), followed by the bytes. A lock keeps the order of all threads and processes.
 * Calls that are missing here would show: the recorded calls must lead to the files that there are.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static int begin(const char *path) /* returns the record, locked, or -1 for a path outside the root */
{
    const char *root = getenv("DISK_ROOT"), *calls = getenv("DISK_CALLS");
    size_t size = root ? strlen(root) : 0;
    if (!root || !calls || strncmp(path, root, size) || (path[size] && path[size] != '/'))
        return -1;
    int record = syscall(SYS_openat, AT_FDCWD, calls, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (record < 0 || flock(record, LOCK_EX))
        abort();
    return record;
}

static int end(int record, long done, const char *call, long file, long at, const void *data, const char *path,
               const char *second)
{
    char line[2 * PATH_MAX + 100];
    int error = errno;
    long size = data ? done : 0;
    struct iovec both[] = {{line, 0}, {(void *)data, size}};
    both[0].iov_len = sprintf(line, "%s\t%ld\t%ld\t%ld\t%s\t%s\n", call, file, at, size, path, second);
    if (record >= 0 && done >= 0 && syscall(SYS_writev, record, both, 2) < 0)
        abort();
    if (record >= 0)
        syscall(SYS_close, record);
    errno = error;
    return done;
}

static char *of_descriptor(int fd, char *path)
{
    char link[64];
    sprintf(link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, PATH_MAX - 1);
    path[size < 0 ? 0 : size] = 0;
    return path;
}

static char *absolute(int folder, const char *name, char *path)
{
    if (name[0] == '/')
        return strcpy(path, name);
    if (folder != AT_FDCWD)
        of_descriptor(folder, path);
    else if (!getcwd(path, PATH_MAX))
        abort();
    return strcat(strcat(path, "/"), name);
}

static long number(int fd)
{
    struct stat status = {0};
    int error = errno;
    fstat(fd, &status);
    errno = error;
    return status.st_ino;
}

int openat(int folder, const char *name, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    char path[2 * PATH_MAX];
    int record = flags & (O_CREAT | O_TRUNC) ? begin(absolute(folder, name, path)) : -1;
    int fd = syscall(SYS_openat, folder, name, flags, mode);
    return end(record, fd, flags & O_TRUNC ? "new" : "open", number(fd), 0, NULL, record < 0 ? "" : path, "");
}

int open(const char *name, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return openat(AT_FDCWD, name, flags, mode);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at)
{
    char path[PATH_MAX];
    int record = begin(of_descriptor(fd, path));
    ssize_t done = at < 0 ? syscall(SYS_write, fd, data, size) : syscall(SYS_pwrite64, fd, data, size, at);
    if (record >= 0 && at < 0)
        at = lseek(fd, 0, SEEK_CUR) - done;
    end(record, done, "write", record < 0 ? 0 : number(fd), at, data, path, "");
    return done;
}

static int on_descriptor(int fd, const char *call, long system_call, long size)
{
    char path[PATH_MAX];
    int record = begin(of_descriptor(fd, path));
    return end(record, syscall(system_call, fd, size), call, number(fd), size, NULL, path, "");
}

static int on_path(int folder, const char *name, const char *call, long system_call, long flags)
{
    char path[2 * PATH_MAX];
    struct stat status = {0};
    int record = begin(absolute(folder, name, path)), done = syscall(system_call, folder, name, flags);
    if (record >= 0 && !done)
        lstat(path, &status);
    return end(record, done, call, status.st_ino, 0, NULL, path, "");
}

int rename(const char *old, const char *new)
{
    char path[2 * PATH_MAX], second[2 * PATH_MAX];
    int record = begin(absolute(AT_FDCWD, old, path));
    int done = syscall(SYS_renameat2, AT_FDCWD, old, AT_FDCWD, new, 0);
    return end(record, done, "rename", 0, 0, NULL, path, absolute(AT_FDCWD, new, second));
}

int link(const char *old, const char *new)
{
    char path[2 * PATH_MAX], second[2 * PATH_MAX];
    int record = begin(absolute(AT_FDCWD, old, path));
    int done = syscall(SYS_linkat, AT_FDCWD, old, AT_FDCWD, new, 0);
    return end(record, done, "link", 0, 0, NULL, path, absolute(AT_FDCWD, new, second));
}

int symlink(const char *target, const char *name)
{
    char path[2 * PATH_MAX];
    int record = begin(absolute(AT_FDCWD, name, path)), done = syscall(SYS_symlinkat, target, AT_FDCWD, name);
    return end(record, done, "symlink", 0, 0, NULL, path, target);
}

int open64(const char *, int, ...) __attribute__((alias("open")));
int openat64(int, const char *, int, ...) __attribute__((alias("openat")));
ssize_t pwrite64(int, const void *, size_t, off_t) __attribute__((alias("pwrite")));
ssize_t write(int fd, const void *data, size_t size) { return pwrite(fd, data, size, -1); }
int fsync(int fd) { return on_descriptor(fd, "fsync", SYS_fsync, 0); }
int ftruncate(int fd, off_t size) { return on_descriptor(fd, "truncate", SYS_ftruncate, size); }
int ftruncate64(int, off_t) __attribute__((alias("ftruncate")));
int unlinkat(int folder, const char *name, int flags) { return on_path(folder, name, "unlink", SYS_unlinkat, flags); }
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }
int mkdir(const char *name, mode_t mode) { return on_path(AT_FDCWD, name, "mkdir", SYS_mkdirat, mode); }
