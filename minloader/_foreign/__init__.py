"""Executors that the user brings: threads, processes of this machine, or those of a cluster.

All that is asked of one is ``submit``. A task carries a reference to the loader's job, some 300
bytes, and each worker process gets the job itself once:

* in the loader's own process (threads) the job is there;
* on the loader's machine it is mapped from its file (``job_file.py``);
* elsewhere it comes through the executor::

    task ──> a worker that lacks the job says so in its reply, and makes nothing
    the next task, which is mostly that one again ──> takes the job along

With Dask the job is scattered once, and what is attached is Dask's future of it: Dask fetches it
to the worker that lacks it, from another worker, as it fetches everything. With any other executor
it is attached as bytes.

An executor of which it is not known that its workers are on this machine gets no slots either, and
for one more reason: a scheduler that believes a worker dead runs its tasks once more elsewhere. If
the worker lives after all, it would write into memory that has been lent to another batch.

A worker process lets a job go when its loader is closed: on the loader's machine within a second or
two, since the file is gone then; elsewhere when Dask brings the news, or after IDLE_SECONDS without
a task. It is sent again if it is needed after all.
"""
